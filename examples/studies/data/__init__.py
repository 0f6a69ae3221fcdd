import harness  # noqa: F401 - says what to install, before the imports of a study fail

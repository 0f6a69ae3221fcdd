"""Published sets that are missing are named."""

import pytest
from data.published_molecules import SETS, load
from real_molecules import RealMoleculesStudy, molecules


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="--data must be the folder of the files of AcAc, got none"):
        molecules(RealMoleculesStudy(sets=("AcAc",)))
    for name in SETS:
        with pytest.raises(FileNotFoundError, match=f"is missing. {name}: "):
            load(tmp_path, name)

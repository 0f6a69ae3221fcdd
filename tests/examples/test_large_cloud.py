"""One cloud over several processes: what each has of it, and what they measure."""

import pytest
from running import number, run


def test_large_cloud(tmp_path):
    """The same outputs and gradients over one process and over two."""
    flags = ["--points", 20_000, "--processes", 1, 2, "--repeats", 1, "--layer", "EwaldAttention", "--output", tmp_path]
    result = run("studies/large_cloud.py", *flags)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in (tmp_path / "large_cloud.md").read_text().splitlines()[4:]]
    assert [int(row[0]) for row in rows] == [1, 2]
    for column in (4, 5):
        assert float(rows[1][column]) == pytest.approx(float(rows[0][column]), rel=1e-4)
    assert all(number(row[2].split()[0]) > 0 and number(row[3].split()[0]) > 0 for row in rows)
    assert (tmp_path / "large_cloud.png").is_file()

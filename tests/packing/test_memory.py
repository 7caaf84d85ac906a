"""A plan of many rows takes little memory: with WDSKIT_ALL=1, 10^7 rows take under 500 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from folders import ALL

NUM_ROWS = 10**7 if ALL else 2 * 10**5
LIMIT_MB = 500 if ALL else 60  # of the growth since 1,000 rows were packed, if not all sizes are tried

SCRIPT = """
import re, sys
from wdskit import pack

def mb(name):
    with open("/proc/self/status") as status:
        return int(re.search(name + r":\\s*(\\d+)", status.read())[1]) >> 10

def rows(num):
    for number in range(num):
        yield {"__key__": f"{number:08d}", "cls": number % 1000, "json": b'{"n":%d}' % number}

if __name__ == "__main__":
    num, kind, is_all = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
    pack(rows(1000), "few", workers=1, shuffle=1)  # what is loaded stays
    before = 0 if is_all else mb("VmRSS")
    if kind == "table":
        with open("t.jsonl", "w") as file:
            file.writelines('{"key":"%08d","n":%d}\\n' % (number, number) for number in range(num))
    # One shard of the plan is filled.
    source = "t.jsonl" if kind == "table" else rows(num)
    pack(source, "d", workers=1, shuffle=1, split="a=0.9,b=0.1", part="0/99999")
    print(mb("VmHWM") - before)
"""


@pytest.mark.parametrize("kind", ["generator", "table"])
def test_the_plan_of_many_rows_takes_little_memory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "m.py").write_text(SCRIPT)
    words = [sys.executable, "m.py", str(NUM_ROWS), kind, str(ALL)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert int(done.stdout) < LIMIT_MB

"""Arrays in shared memory: one copy however many processes read them, found by loans, freed with the last reader."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax.shared_arrays import LEAST_LOAN, Loan, borrow, lend, share

PIXELS = np.random.default_rng(0).random((3, 80, 80), np.float32)
ELSEWHERE = """
import json, sys
from relax.shared_arrays import Loan, borrow
array = borrow(Loan(*json.loads(sys.stdin.readline())))
print("borrowed", flush=True)
sys.stdin.readline()
print(json.dumps([str(array.dtype), list(array.shape), float(array.sum(dtype="float64"))]))
"""


def num_open() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


def test_another_process_reads_the_array_where_it_lies_and_keeps_it() -> None:
    shared = share({"few": np.arange(3), "pixels": PIXELS})
    loan = lend(shared["pixels"])
    assert loan is not None
    reader = subprocess.Popen([sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{list(loan)}\n".replace("'", '"'))
    reader.stdin.flush()
    assert reader.stdout.readline() == "borrowed\n"
    del shared  # the owner lets go before it is read
    out, _ = reader.communicate("\n", timeout=60)
    assert out.strip() == f'["float32", [3, 80, 80], {PIXELS.sum(dtype="float64")}]'


def test_what_is_lent_can_be_lent_on_and_is_read_only() -> None:
    first = share({"pixels": PIXELS})["pixels"]
    second = borrow(lend(first))
    third = borrow(lend(second[1:]))  # a view, of which the first owner knows nothing
    del first, second
    np.testing.assert_array_equal(third, PIXELS[1:], strict=True)
    with pytest.raises(ValueError, match="read-only"):
        third[0] = 0


def test_memory_goes_with_its_last_array() -> None:
    before = num_open()
    shared = share({"few": np.arange(3), "pixels": PIXELS})
    loan, rest = lend(shared["pixels"]), shared["few"]
    del shared
    assert num_open() > before
    np.testing.assert_array_equal(borrow(loan), PIXELS)
    del rest
    assert num_open() == before
    with pytest.raises(FileNotFoundError):
        borrow(loan)
    other = share({"pixels": PIXELS + 1})  # which gets the same descriptor
    assert lend(other["pixels"]).fd == loan.fd
    with pytest.raises(FileNotFoundError):
        borrow(loan)


def test_only_what_is_worth_it_is_lent() -> None:
    shared = share(
        {"grid": np.array([[1, 2, 3]]), "none": np.zeros((0, 9)), "pixels": PIXELS, "text": np.zeros(LEAST_LOAN, "i1")}
    )
    assert {name for name, array in shared.items() if lend(array)} == {"pixels", "text"}
    assert lend(PIXELS) is None
    assert lend(shared["pixels"].T) is None, "a loan says nothing of strides"


def test_without_room_nothing_stays_open(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    before = num_open()
    with pytest.raises(OSError, match="No space"):
        share({"pixels": PIXELS})
    assert num_open() == before


@pytest.mark.parametrize(
    "wrong", [{"shape": [1 << 20]}, {"shape": [-1]}, {"offset": 1 << 20}, {"offset": -64}, {"shape": ["a"]}, {"dtype": "O"}]
)
def test_a_loan_of_no_array_is_refused(wrong) -> None:
    shared = share({"pixels": PIXELS})
    loan: Loan = lend(shared["pixels"])
    with pytest.raises(ValueError, match=r"at Loan|array"):
        borrow(loan._replace(**wrong))

import gc

import pytest
import torch

from jupyter_gpumem.leak_report import find_leaks
from tests.conftest import Shell

MIB = 1024**2
PREPARE = '%load_ext jupyter_gpumem\nimport numpy as np, torch\ndef T(): return torch.empty(1 << 18, device="cuda")'


def remedies_run(shell: Shell) -> list[tuple[str, int, int]]:
    """Run the remedy of the largest holder until nothing is left: path, bytes promised, bytes that came back."""
    found = []
    while holders := find_leaks(shell.ip).holders:
        before = torch.cuda.memory_allocated()
        assert shell.run(holders[0].remedy).error is None
        gc.collect()
        found.append((holders[0].path, holders[0].keeps_bytes, before - torch.cuda.memory_allocated()))
        assert len(found) < 5
    return found


@pytest.mark.parametrize(
    ("cell", "path", "nbytes"),
    [
        ("arr = np.empty(3, object); arr[0], arr[1] = T(), [T()]; view = arr[:1]", "arr, view.base", 2 * MIB),
        ("arr = np.empty(4, object); arr[3] = {'w': T()}; arr = arr.reshape(2, 2)", "arr.base[3]['w']", MIB),
        ("arr = np.zeros((2, 2), [('a', int), ('o', object)]); arr['o'][1, 0] = T()", "arr['o'][1, 0]", MIB),
        (
            "arr = np.zeros(2, [('s', [('o', object)])]); arr['s']['o'][1] = T(); col = arr['s']; del arr",
            "col.base['s']['o'][1]",
            MIB,
        ),
        (
            "arr = np.empty(1, object); arr[0] = [T()]; top = np.empty(1, object); top[0] = arr; del arr",
            "top[0][0][0]",
            MIB,
        ),
        ("x = T(); arr = np.empty(2, object); arr[1] = x", "x, arr[1]", MIB),
    ],
)
def test_what_a_numpy_array_holds_is_named_and_promised_once(shell: Shell, cell: str, path: str, nbytes: int) -> None:
    shell.run(PREPARE)
    shell.run(cell)
    assert remedies_run(shell) == [(path, nbytes, nbytes)]


def test_an_array_in_a_cycle_is_garbage(shell: Shell) -> None:
    shell.run(PREPARE + "\nclass C: pass")
    gc.disable()
    try:
        shell.run("c = C(); c.a = np.empty(1, object); c.a[0] = T(); c.me = c; del c")
        (holder,) = find_leaks(shell.ip).holders
    finally:
        gc.enable()
    assert (holder.kind, holder.keeps_bytes) == ("garbage", MIB)


def test_a_subclass_of_arrays_is_read_without_its_code(shell: Shell) -> None:
    shell.run(PREPARE + "\nruns = []\nclass A(np.ndarray):\n    def __array_finalize__(self, other): runs.append(1)")
    shell.run("a = A(2, object); a[1] = T(); del runs[:]")
    assert remedies_run(shell) == [("a[1]", MIB, MIB)]
    assert shell.ip.user_ns["runs"] == []

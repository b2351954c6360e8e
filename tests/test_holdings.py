from types import SimpleNamespace

from jupyter_gpumem.holdings import bytes_held_by
from tests.conftest import Kernel, Shell

MIB = 1 << 20


def test_what_the_shell_keeps_is_not_held_by_what_leads_to_the_shell(taking: Shell) -> None:
    taking.run("x = take(4)\nx")
    taking.run("x")
    leads = SimpleNamespace(owner=taking.ip, hook=taking.ip.displayhook)
    assert bytes_held_by((leads, taking.ip), taking.ip) == 0
    assert bytes_held_by((leads, taking.ns["x"]), taking.ip) == 4 * MIB
    assert bytes_held_by((SimpleNamespace(ip=taking.ip, x=taking.ns["x"]),), taking.ip) == 4 * MIB


def test_a_log_handler_and_an_event_loop_hold_nothing_of_an_output(kernel: Kernel) -> None:
    kernel.run("%load_ext jupyter_gpumem\n%gpumem simulate 1GiB\nimport torch")
    kernel.run("a = torch.empty(3 << 20, device='cuda')\na")
    outputs = kernel.run(
        "%%gpumem\nimport asyncio, logging, threading\nhandler = logging.StreamHandler()\n"
        "loop = asyncio.get_running_loop()\nthread = threading.Thread(target=print)\nip = get_ipython()\nb = [a]"
    )
    table = outputs.text[outputs.text.index("variables") :].splitlines()
    assert [row.split() for row in table[1:]] == [["b", "12.0", "MiB", "created"]]
    assert "keeps" not in kernel.run("loop").text

"""The comm to the front end's sidebar: opens the panel there, and learns whether anybody sees it."""

import uuid
from typing import TYPE_CHECKING, Any, Protocol

from jupyter_gpumem.errors import GpuMemError
from jupyter_gpumem.render.layout import Block, Page, quiet, to_html, to_text
from jupyter_gpumem.subshell import let_clicks_use_the_subshell
from jupyter_gpumem.viewers import Viewers

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpumem.cells import CellRecorder
    from jupyter_gpumem.panel import Panel

TARGET = "jupyter_gpumem"

_ANSWER_SECONDS = 1.5


class SidebarOptions(Protocol):
    """The options the sidebar and its panel follow."""

    interval: float
    scan_seconds: float
    open_sidebar: bool


class Sidebar:
    """The panel of one shell, in the sidebar where the front end has one, else below a cell.

    Until a front end shows the panel nothing is imported, no thread runs and no widget exists.
    """

    def __init__(self, shell: "InteractiveShell", recorder: "CellRecorder", options: SidebarOptions) -> None:
        self._shell = shell
        self._recorder = recorder
        self._options = options
        self._comms: list[Any] = []
        loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
        self._viewers = Viewers(loop, recorder, self._ask_who, self._tell_panel)
        self._answered = False
        self._asked = ""
        self._greeted = False
        self._closed = False
        self.panel: Panel | None = None

    def start(self) -> None:
        """Offer the panel to the front end, where there is one; microseconds, and nothing waits for an answer."""
        if getattr(self._shell, "kernel", None) is None:
            return
        import comm

        comm.get_comm_manager().register_target(TARGET, self._opened)
        if self._asked_by_a_person():
            self._take(comm.create_comm(target_name=TARGET, data={"reveal": bool(self._options.open_sidebar)}))

    def _asked_by_a_person(self) -> bool:
        """Tell a front end from a program that runs notebooks: nbconvert answers no question and warns of a comm."""
        get_parent = getattr(getattr(self._shell, "kernel", None), "get_parent", None)
        parent: dict[str, Any] = get_parent("shell") if get_parent is not None else {}
        return bool(parent.get("content", {}).get("allow_stdin", True))

    def _opened(self, channel: Any, _message: Any) -> None:
        """Take a comm that a front end opened by itself."""
        if not self._closed:
            self._take(channel)

    def _take(self, channel: Any) -> None:
        let_clicks_use_the_subshell(channel)
        channel.on_msg(lambda message: self._received(channel, message["content"]["data"]))
        channel.on_close(lambda _message: self._lost(channel))
        self._comms.append(channel)

    def _received(self, channel: Any, data: dict[str, Any]) -> None:
        """Hear a window of the front end: it is there, it shows the panel, it no longer does."""
        method, client = data.get("method"), str(data.get("client"))
        if method == "hello":
            self._answered, self._asked = True, ""
            # the comm may have been opened before any window listened, by an extension loaded with the kernel
            if self._options.open_sidebar and not self._greeted:
                channel.send({"method": "first"})
            self._greeted = True
            if self.panel is not None:
                self.panel.moved_to_sidebar()
        elif method == "shown":
            self._viewers.came(client)
            channel.send({"model_id": self._make_panel().widget.model_id})
        elif method == "hidden":
            self._viewers.left(client)
        self._tell_panel()

    def _lost(self, channel: Any) -> None:
        """Note that a comm was closed: at once where the front end has no sidebar."""
        if channel in self._comms:
            self._comms.remove(channel)
        if not self._comms:
            self._answered = False
            self._viewers.clear()
            self._tell_panel()

    def _ask_who(self) -> None:
        for channel in self._comms:
            channel.send({"method": "who"})

    def _tell_panel(self) -> None:
        if self.panel is not None:
            self.panel.set_seen_in_sidebar(bool(self._viewers))

    def _make_panel(self) -> "Panel":
        if self.panel is None:
            from jupyter_gpumem.panel import Panel

            self.panel = Panel(self._shell, self._recorder, self._options, drawn=self._viewers.drawn)
        return self.panel

    @property
    def in_sidebar(self) -> bool:
        """Tell whether a front end with a sidebar has answered."""
        return self._answered and bool(self._comms)

    def show(self) -> None:
        """Open the sidebar, or show the panel below the running cell where there is none.

        Raises
        ------
        GpuMemError
            In a terminal, which shows no widgets.
        """
        if getattr(self._shell, "kernel", None) is None:
            raise GpuMemError("the panel needs a notebook; %gpumem says the same in a terminal")
        if self.in_sidebar:
            self._reveal()
        elif self._asked_by_a_person():
            self._make_panel().show()
        else:
            self._say(
                "The panel is live: it shows where somebody has the notebook open; %gpumem says the same in text."
            )

    def _reveal(self) -> None:
        """Ask every window to open its sidebar; if none is left that answers, the panel is shown here after all."""
        self._asked = asked = uuid.uuid4().hex
        for channel in self._comms:
            channel.send({"method": "reveal"})
        self._say("The panel is in the right sidebar.", asked)
        # an answer may lie behind the running cell: the wait begins when that has ended
        loop = self._shell.kernel.io_loop  # type: ignore[attr-defined]  # ipykernel's
        loop.add_callback(loop.call_later, _ANSWER_SECONDS, self._not_answered, asked)

    def _say(self, words: str, display_id: str = "") -> None:
        page = Page((Block(((quiet(words),),)),))
        data = {"text/plain": to_text(page), "text/html": to_html(page)}
        self._shell.display_pub.publish(data, transient={"display_id": display_id} if display_id else {})

    def _not_answered(self, asked: str) -> None:
        if self._asked == asked and not self._closed:
            self._answered = False
            self._viewers.clear()
            self._make_panel().show(instead_of=asked)

    def close(self) -> None:
        """Close the comm and the panel; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for channel in self._comms:
            channel.close()
        self._comms.clear()
        if getattr(self._shell, "kernel", None) is not None:
            import comm

            manager = comm.get_comm_manager()
            if manager.targets.get(TARGET) == self._opened:
                manager.unregister_target(TARGET, self._opened)
        if self.panel is not None:
            self.panel.close()

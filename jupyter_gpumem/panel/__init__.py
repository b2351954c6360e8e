"""The live panel, made of core ipywidgets; imported when it is first shown."""

from jupyter_gpumem.panel.live import Panel

__all__ = ["Panel"]

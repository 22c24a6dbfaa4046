"""IPython settings of the kernels that build the book: figures as SVG, the same bytes every time.

Copied to the build folder's own IPython profile, so that a reader's profile plays no part.
"""

c = get_config()  # type: ignore[name-defined]  # noqa: F821

c.InlineBackend.figure_formats = {"svg"}
c.InlineBackend.rc = {"svg.hashsalt": "from-reward-to-policy"}
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Date": None}}
c.HistoryManager.enabled = False
c.IPKernelApp.log_level = "ERROR"

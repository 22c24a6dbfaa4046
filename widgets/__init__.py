"""The book's teaching widgets.

Each is one Python class (`name.py`: traits, numbers from `rlcore.objectives`) and one ES module
(`name.js`: the drawing and the same mathematics). In JupyterLab the browser draws at once and
rlcore's numbers replace its own; in the built page the module runs alone, with no kernel.
"""

from widgets.answer_box import AnswerBox
from widgets.credit_share import SUM_TO_100, CreditShare
from widgets.group_advantage import GroupAdvantage
from widgets.rare_success import RareSuccess

__all__ = ["SUM_TO_100", "AnswerBox", "CreditShare", "GroupAdvantage", "RareSuccess"]

"""The open scoreboard: turns published measurements of steps into scenarios, and scores the predictions."""

from moesim.simulator.scoring.scoreboard.rows import OpenRow, open_rows
from moesim.simulator.scoring.scoreboard.score import Board, ScoredRow, score_all

__all__ = ["Board", "OpenRow", "ScoredRow", "open_rows", "score_all"]

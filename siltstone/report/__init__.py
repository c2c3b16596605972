"""The picture of a chain: what each checkpoint wrote, what a restore reads, D, the bounds and the measured restores.

catalog -- report_data --> ReportData --> draw_report        a page as .png, .svg or .pdf
                                     |--> summary_table      for a terminal, one row per operator
                                     |--> checkpoint_table   for a terminal, one row per checkpoint
                                     '--> to_dict            as JSON
"""

from siltstone.report.data import CheckpointPoint, OperatorPart, ReportData, report_data
from siltstone.report.picture import check_picture_path, draw_report
from siltstone.report.summary import checkpoint_table, summary_table

__all__ = [
    "CheckpointPoint",
    "OperatorPart",
    "ReportData",
    "check_picture_path",
    "checkpoint_table",
    "draw_report",
    "report_data",
    "summary_table",
]

"""Monitors, and the one that has them all."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(
    __name__,
    {
        **same("onefold.report.monitors", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "CometMonitor"),
        "csvMonitor": "onefold.report.monitors.CsvMonitor",
        "Monitor": "onefold.report.monitors.EventWriter",
    },
)

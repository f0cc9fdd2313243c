"""`ds_report`: onefold's own report of the machine."""

from __future__ import annotations

from onefold.env_report import main


def cli_main() -> None:
    raise SystemExit(main())

"""The command `sandgate`: one command a file, each imported only when it is used."""


def main() -> None:
    """Run the command line and exit with its code."""
    from gateway.cli.app import run

    raise SystemExit(run())

"""The dashboard's entry: navigation only."""


def main() -> None:
    """Show the chosen page."""
    from moesim.app import shell
    from moesim.app.pages import PAGES

    shell.run(PAGES)


if __name__ == "__main__":
    main()

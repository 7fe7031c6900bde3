"""The dashboard's entry: navigation only."""


def main() -> None:
    """Show the chosen page."""
    from moesim.app import navigation
    from moesim.app.pages import PAGES

    navigation.run(PAGES)


if __name__ == "__main__":
    main()

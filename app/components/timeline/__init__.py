"""The timeline of a step as a component: a canvas with scripts of our own, served by the dashboard itself."""

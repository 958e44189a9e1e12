"""Self-contained HTML pages: Jinja templates, each beside the module that fills it, in one frame and one style."""

"""The tables of docs/reference, which are generated from the code, and the site that `make docs` builds.

    pages.py         writes the tables of docs/reference: python -m tools.website.pages
    options.py       tables of options
    stubs.py         signatures of classes and functions
    json_types.py    describes the messages of msgspec as JSON
    fields.py        finds the descriptions of fields in this project's docstrings
    hooks.py         MkDocs: which files are pages, in which order, and where their links lead
    home.md          the first page, which quotes the README
    docstrings.py    writes a docstring as Markdown
    griffe_fields.py mkdocstrings: shows types, defaults and examples with the docstrings

`hooks.py`, `griffe_fields.py` and what they import run in the environment of the site, which has neither torch nor this
project's package.
"""

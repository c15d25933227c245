"""What only maintainers run. Not installed.

prose.py  checks the language of documents and messages: make lint
release   the plugin's wheel, and the wheel of SGLang and the plugin in one: make wheel, make fork
website   the reference pages, and the site of all documents: make docs
oracle    the weights that stock SGLang would have, to compare with
"""

"""A model of an update that may be given up: the trainer, two engine ranks and the wire between them.

The control server is no model: it is the package's own `SessionStore`. `explore` visits every state that the others can
bring about, with messages that are delayed, lost and delivered twice, waits that time out and connections that break.
"""

"""A load generator for every layer of the stack, and a report of what it measured.

One measurement: ``load`` plans the requests, ``measure`` starts the generators, which are processes of
their own (``worker``) that speak one target's protocol (``drivers``), and samples the processes of the
servers meanwhile (``processes``); ``report`` makes figures of what came back. ``servers`` starts what is
measured, and ``cli`` runs it all for one command line.
"""

"""What the papers say, and nothing else: pure functions of arrays, one file a system.

Functions named ``client_*`` run where the records are, functions named ``server_*`` see only
what clients sent. Protocols stand between the two.
"""

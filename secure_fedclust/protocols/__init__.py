"""Where algorithms and protection meet: one file a system, which reads like its protocol.

Each file lists the stages (what is asked, what is answered), the client's side, and the server's
side as one function from top to bottom.
"""

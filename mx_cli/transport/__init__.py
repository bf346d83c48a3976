"""How peers talk: the control channel (TLS, handshake, grants) and the paths that their bytes take."""

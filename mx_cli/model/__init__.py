"""What a checkpoint is. Pure: nothing here opens a file or a socket."""

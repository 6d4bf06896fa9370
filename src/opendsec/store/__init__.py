"""Images on this node: content-addressed files, how they are made, and the layers mounted from them."""

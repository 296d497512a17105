"""The edge that moves bytes: transports that read pages, and nothing that decides about them."""

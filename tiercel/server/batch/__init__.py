"""Files of tenants on disk, and the batches of requests that are read from them and answered into them."""

"""The Prometheus metrics of the HTTP process and the pages made from them."""

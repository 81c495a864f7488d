#!/usr/bin/env python3
import _checkout

if __name__ == "__main__":
    # Its load generators import this file.
    _checkout.run("bench-engine")

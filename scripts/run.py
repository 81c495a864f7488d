#!/usr/bin/env python3
import _checkout

_checkout.run("run")

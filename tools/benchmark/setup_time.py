"""A program that prints the seconds of a predictor's setup: python -m tools.benchmark.setup_time"""

import asyncio
import time

from predict import Predictor


async def setup_seconds() -> float:
    """Return how long a predictor's setup takes, and stop the predictor."""
    predictor = Predictor()
    began = time.perf_counter()
    await predictor.setup()
    seconds = time.perf_counter() - began
    await predictor.deployment.stop()
    return seconds


if __name__ == "__main__":
    print(asyncio.run(setup_seconds()))

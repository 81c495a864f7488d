from .llm_args import KvCacheConfig

__all__ = ["KvCacheConfig"]

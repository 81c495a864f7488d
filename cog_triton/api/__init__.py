"""The APIs that clients call: OpenAI's and Anthropic's, Cog's, and a worker of NVIDIA Dynamo."""

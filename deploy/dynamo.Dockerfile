# The Dockerfile's image with NVIDIA Dynamo, for `cog-triton worker` and Dynamo's frontend. See docs/scale.md.
#
#     docker build -t cog-triton .
#     docker build -f deploy/dynamo.Dockerfile -t cog-triton-dynamo .
ARG COG_TRITON_IMAGE=cog-triton
FROM ${COG_TRITON_IMAGE}
USER 0:0
# As in the Dockerfile, packages that TensorRT-LLM or vLLM needs keep their versions, except pydantic: Dynamo 1.6.1
# supports 2.13 at most. The overrides leave out packages that Dynamo requires but does not import.
RUN mkdir /tmp/image && cp requirements/image.in requirements/image.txt /tmp/image/ \
    && python3 scripts/image_requirements.py /tmp/image \
    && sed -i '/^pydantic/d' /tmp/image/constraints.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir "uv>=0.13,<0.14" \
    && python3 -m uv pip install --system --break-system-packages --no-cache \
        --override requirements/dynamo-overrides.txt --constraint /tmp/image/constraints.txt "ai-dynamo>=1.6.1,<1.7" \
    && rm -r /tmp/image
USER 10001:10001

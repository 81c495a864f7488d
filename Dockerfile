# Adds the predictor to NVIDIA's image of tritonserver with TensorRT-LLM. See docs/gpu.md.
#
#     docker build -t cog-triton .
#     cog build --dockerfile Dockerfile -t cog-triton
#
# On NVIDIA's image of tritonserver with vLLM instead (0.27.1 in this release):
#
#     docker build --build-arg TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.08-vllm-python-py3 -t cog-triton .
#
# 26.07 is the last release with TensorRT-LLM 1.2, the last version that runs TensorRT engines. TRITON_IMAGE may also
# name an image by its digest.
ARG TRITON_VERSION=26.07
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-trtllm-python-py3
FROM ${TRITON_IMAGE}

ARG TRITON_IMAGE
LABEL org.opencontainers.image.title="cog-triton" \
      org.opencontainers.image.description="A Cog predictor that runs Triton Inference Server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${TRITON_IMAGE}"

# coglet starts its worker with the first `python` in PATH, and `cog build` runs `python -m pip`.
RUN command -v python || ln -s "$(command -v python3)" /usr/local/bin/python

# A separate user id, because Ubuntu's and Triton's users have 1000. In Kubernetes, Cog reports that it is ready in
# /var/run/cog. The cache directory exists so that a volume mounted on it gets its owner.
RUN useradd --no-log-init --user-group --create-home --uid 10001 cog \
    && install --directory --owner=cog --group=cog /src /var/run/cog /home/cog/.cache

# Packages that TensorRT-LLM, vLLM and PyTorch need are constraints: pip only adds packages, and fails rather than
# change those. The added packages are locked, and checked against their hashes. The script explains the exceptions,
# protobuf and grpcio.
COPY requirements/image.in requirements/image.txt scripts/image_requirements.py /tmp/image/
RUN python3 /tmp/image/image_requirements.py /tmp/image \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --require-hashes \
        --constraint /tmp/image/constraints.txt --requirement /tmp/image/additions.txt \
    && rm -r /tmp/image
# Triton's Python stubs ignore PYTHONPATH, and find cog_triton through this file. It also prepares Cog's server
# (cog_triton/api/cog/server.py).
RUN python3 -c "import pathlib, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'cog_triton.pth').write_text('/src\nimport sys; \'cog.server.http\' in sys.orig_argv and __import__(\'cog_triton.api.cog.server\').api.cog.server.prepare()')"

# Cog's server runs on one thread: with more, it refuses requests although slots are free (docs/replicate.md). The port
# that OPENAI_PORT opens can be reached from outside, like Cog's.
ENV COG_PREDICT_TYPE_STUB=predict.py:Predictor \
    COG_TRAIN_TYPE_STUB=train.py:train \
    COG_MAX_CONCURRENCY=512 \
    HOME=/home/cog \
    OPENAI_HOST=0.0.0.0 \
    PORT=5000 \
    PYTHONUNBUFFERED=1 \
    TOKIO_WORKER_THREADS=1
WORKDIR /src
# The second is for OpenAI's API, with OPENAI_PORT=3000.
EXPOSE 5000 3000
STOPSIGNAL SIGTERM
# Healthy if it accepts predictions. Loading a model may take minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ['PORT']), timeout=4.5); c.request('GET', '/health/ready'); r = c.getresponse(); print(r.read().decode()); raise SystemExit(r.status != 200)"]

# The command cog-triton, in Python's directory.
RUN python3 -c "import pathlib, sys; command = pathlib.Path(sys.executable).with_name('cog-triton'); command.write_text('#!' + sys.executable + '\nimport sys\nfrom cog_triton.cli import main\nsys.exit(main())\n'); command.chmod(0o755)"

# Last, because it changes most.
COPY --chown=10001:10001 . /src
USER 10001:10001
# Run as the final user and without a GPU; this also checks that everything can be imported.
RUN python3 scripts/make_schema.py

# NVIDIA's entrypoint stays: it sets up CUDA's forward compatibility, and runs this as process 1.
CMD ["python3", "-m", "cog.server.http"]

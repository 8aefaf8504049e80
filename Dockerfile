# One image for the worker, the server, the migration and the command line. Kernels are compiled when a worker starts,
# so the image holds the CUDA toolkit. For a machine without a GPU:
#   docker build --build-arg BASE=python:3.12-slim --build-arg EXTRAS=worker,hub,postgres,server .
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}
ARG EXTRAS=cuda,hub,postgres,server
RUN command -v python3 >/dev/null || \
    (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ \
     && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/nightmill
# /cache: models that are fetched by name, and compiled kernels.
ENV PATH=/opt/nightmill/bin:$PATH PYTHONUNBUFFERED=1 NIGHTMILL_DATA_DIR=/data XDG_CACHE_HOME=/cache
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY jobs jobs
COPY worker worker
COPY cuda cuda
COPY migrations migrations
COPY models models
RUN pip install --no-cache-dir ".[${EXTRAS}]"
RUN useradd --create-home nightmill && mkdir /data /cache && chown nightmill /data /cache
USER nightmill
WORKDIR /home/nightmill
VOLUME /data /cache
ENTRYPOINT ["nightmill"]
CMD ["worker"]

# The processes of a cluster. `memoryx`, for MemoryX and wafers, has a C++ compiler, `node` all but that; `ray` has Ray
# as well, for hosts on which any role may run.
FROM python:3.11-slim AS build
# An index of CPU wheels of torch spares several GB of CUDA libraries: --build-arg TORCH_INDEX=URL
ARG TORCH_INDEX=""
RUN python -m venv /opt/waferbox
ENV PATH=/opt/waferbox/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
# The dependencies in a layer of their own, which changes of the code leave alone.
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt && pip install -r requirements.txt
COPY . .
RUN pip install --no-deps .

FROM build AS build-ray
RUN pip install ray==2.60.0

FROM python:3.11-slim AS bare
RUN useradd --uid 1000 --create-home waferbox && \
    install -d -o waferbox /var/lib/waferbox /var/lib/waferbox-view /var/lib/waferbox-vendor && \
    install -d -o waferbox -m 700 /var/lib/waferbox-secret
ENV PATH=/opt/waferbox/bin:$PATH WAFERBOX_CACHE=/var/lib/waferbox OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
USER waferbox
WORKDIR /home/waferbox
VOLUME /var/lib/waferbox
EXPOSE 7000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "waferbox.rpc.health_check", "127.0.0.1:7000"]
ENTRYPOINT ["python", "-m"]

FROM bare AS bare-compiler
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
USER waferbox

# What changes with the code comes last.
FROM bare AS node
COPY --from=build /opt/waferbox /opt/waferbox

FROM bare-compiler AS ray
COPY --from=build-ray /opt/waferbox /opt/waferbox

FROM bare-compiler AS memoryx
COPY --from=build /opt/waferbox /opt/waferbox

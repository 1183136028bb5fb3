# syntax=docker/dockerfile:1
# The daemon, without torch: it moves bytes and needs no GPU.

FROM python:3.11-slim AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Dependencies first: they change less often than the source, and this layer is then kept.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN python -m venv /opt/hoststage \
    && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['server'], sep='\n')" > /tmp/server.txt \
    && /opt/hoststage/bin/pip install -c requirements.lock -r /tmp/server.txt
COPY proto proto
COPY server server
COPY client client
RUN python -m pip wheel --no-deps --wheel-dir /dist . \
    && /opt/hoststage/bin/pip install --no-deps /dist/hoststage-*.whl \
    && /opt/hoststage/bin/pip check \
    && /opt/hoststage/bin/hoststage --help > /dev/null

FROM python:3.11-slim AS runtime
LABEL org.opencontainers.image.title="hoststage" \
      org.opencontainers.image.description="The host-memory tier of an LLM serving node, as a service." \
      org.opencontainers.image.licenses="Apache-2.0"
# A fixed numeric id: Kubernetes checks runAsNonRoot by number, and volumes are given to it by number.
RUN groupadd --gid 10001 hoststage \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/hoststage --shell /usr/sbin/nologin hoststage \
    && install -d -o 10001 -g 10001 -m 0770 /run/hoststage /var/lib/hoststage
COPY --from=builder /opt/hoststage /opt/hoststage
ENV PATH=/opt/hoststage/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/hoststage
# The sockets, and the embedded file store.
VOLUME ["/run/hoststage", "/var/lib/hoststage"]
EXPOSE 9477
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD ["hoststage", "health"]
ENTRYPOINT ["hoststage"]
CMD ["serve"]

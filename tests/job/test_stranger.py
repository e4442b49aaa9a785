"""Who can reach JAX's coordination service can end a job; with certificates, which JAX has from 0.12 on, not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from headrace.core.errors import ConfigError
from headrace.job.join import refuse_missing_tls
from tests.fork_server import Popen

from .processes import PATIENCE, SRC
from .test_joined_programs import free_port

HAS_TLS = hasattr(jax.config, "jax_mtls_cert_file")
NAMES = ("CERT", "KEY", "CA")
PROGRAM = """
import subprocess, sys
import jax
import headrace
from headrace.job import current_group
with headrace.join_job() as info:
    group = current_group()
    if info.is_first:
        from jax._src.distributed import global_state
        words = [sys.executable, "-c", sys.argv[1], global_state.coordinator_address]
        said = subprocess.run(words, capture_output=True, text=True)
        print("stranger", said.returncode, said.stdout)
    print("together", group.all_gather(info.process), flush=True)
"""
STRANGER = """
import os, sys
for name in [name for name in os.environ if name.startswith("JAX_MTLS")]:
    del os.environ[name]
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=3, shutdown_on_destruction=False)
client.connect()
"""


def certificates(place: Path) -> dict[str, str]:
    """Make an authority and one certificate of a job; return the variables that name them."""
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    (place / "names").write_text("subjectAltName=URI:spiffe://headrace/job\nextendedKeyUsage=serverAuth,clientAuth\n")
    signed = [
        "openssl",
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-CA",
        "ca.pem",
        "-CAkey",
        "cakey.pem",
        "-CAcreateserial",
    ]
    for words in (
        [*new, "-x509", "-keyout", "cakey.pem", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority"],
        [*new, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=job"],
        [*signed, "-days", "2", "-extfile", "names", "-out", "cert.pem"],
    ):
        subprocess.run(words, cwd=place, check=True, capture_output=True)
    files = {f"JAX_MTLS_{name}_FILE": str(place / f"{name.lower()}.pem") for name in NAMES}
    return files | {"JAX_MTLS_PEER_URI_PREFIX": "spiffe://headrace/"}


@pytest.mark.skipif(not HAS_TLS, reason="this JAX has no certificates")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_with_certificates_a_stranger_does_not_get_in(tmp_path: Path) -> None:
    port, tls = free_port(), certificates(tmp_path)
    common = {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "HEADRACE_COORDINATOR": f"127.0.0.1:{port}"} | tls
    started = [
        Popen(
            [sys.executable, "-c", PROGRAM, STRANGER],
            cwd=tmp_path,
            env={**os.environ, **common, "HEADRACE_NUM_PROCESSES": "2", "HEADRACE_PROCESS": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in ("0", "1")
    ]
    try:
        first, second = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], first + second
    assert "stranger -6" in first  # JAX aborts a process that cannot connect
    assert "together [0, 1]" in first
    assert "together [0, 1]" in second


@pytest.mark.skipif(HAS_TLS, reason="this JAX has certificates")
def test_certificates_that_jax_would_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"JAX_MTLS_CERT_FILE is set, but JAX [\d.]+ connects .* without"):
        refuse_missing_tls({"JAX_MTLS_CERT_FILE": "cert.pem"})
    refuse_missing_tls({})

# Two commands: `make quickstart` gives a running platform and a demo, `make test` passes all tests.
# Both install what they need, may be repeated, and stop with one sentence when the machine lacks something.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
IMAGE := debian
REQUIRE ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test host packages venv native image kernel diskkernel firecracker lock clean

help:
	@echo "make quickstart   install, build, make the image \`$(IMAGE)\`, start the platform, run the demo"
	@echo "make test         install what the tests need and run all of them"
	@echo "make clean        stop the platform, remove $(VENV) and build products (images stay)"

quickstart: image
	@$(VENV)/bin/opendsec up -d
	@$(VENV)/bin/opendsec demo
	@cat docs/next-steps.txt

test: image kernel diskkernel firecracker
	@scripts/run-tests '$(VENV)' '$(REQUIRE)' $(PYTEST_ARGS)

host:
	@scripts/host-check '$(PYTHON)'

packages: host
	@scripts/packages

venv: packages
	@scripts/venv '$(PYTHON)' '$(VENV)'

native: venv
	@$(MAKE) -s -C native install

image: native
	@$(VENV)/bin/opendsec image inspect $(IMAGE) >/dev/null 2>&1 \
	  || $(VENV)/bin/opendsec image build-debian $(IMAGE)

# Without a package index tests of virtual machines are skipped, and say so; .ci/run does not let them.
kernel: native
	@$(VENV)/bin/opendsec kernel install --if-missing || true

diskkernel: native
	@$(VENV)/bin/opendsec kernel fetch --if-missing || true

firecracker: native
	@$(VENV)/bin/opendsec firecracker install --if-missing || true

lock:
	@scripts/lock

clean:
	@if [ -x $(VENV)/bin/opendsec ]; then $(VENV)/bin/opendsec down; fi
	@$(MAKE) -s -C native clean
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything happens in .venv; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3.11
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help build build-native demo test lint types protos protos-check clean

help:
	@echo "make build | demo | test | lint | types | protos | protos-check | clean"

# The stamp is newer than whatever decides what is installed.
.venv/installed: pyproject.toml setup.py constraints.txt $(wildcard native/*.[ch]) native/build.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,plot,smg,otel,dev]'
	touch $@

build: .venv/installed

# The C extensions alone, in place.
build-native:
	$(BIN)/python native/build.py all

demo: build
	$(BIN)/moe-lens demo

test: build
	$(BIN)/python -m pytest

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: build
	$(BIN)/mypy

# Stubs of the .proto files, committed so that nobody needs the generator to build.
protos:
	$(BIN)/python -m protos.generate

protos-check:
	$(BIN)/python -m protos.generate --check

clean:
	rm -rf build *.egg-info native/*.so native/_attention.c native/_channel.c native/_gemm.c .venv

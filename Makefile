# Thin lines over `python -m book`, which works without make as well.
# Another interpreter: make book PYTHON=python3.12
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python)

.PHONY: help setup book test lab serve check tidy homework grade record bench gpu-check clean

help:
	@$(PYTHON) -m book help

setup:
	@$(PYTHON) -m book setup

book:
	@$(PYTHON) -m book build

test:
	@$(PYTHON) -m book test

lab:
	@$(PYTHON) -m book lab

serve:
	@$(PYTHON) -m book serve

check:
	@$(PYTHON) -m book check

tidy:
	@$(PYTHON) -m book tidy

homework:
	@$(PYTHON) -m book homework

grade:
	@test -n "$(SUBMISSIONS)" || { echo "say which folder: make grade SUBMISSIONS=folder"; exit 2; }
	@$(PYTHON) -m book grade "$(SUBMISSIONS)"

record:
	@$(PYTHON) -m book record

bench:
	@$(PYTHON) -m book bench

gpu-check:
	@$(PYTHON) -m book gpu-check

clean:
	@$(PYTHON) -m book clean

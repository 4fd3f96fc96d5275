# make quickstart | make test | make test-all | make test-isa | make docs | make results-readme | make bench | make day | make other_text
SHELL := /bin/sh
BIN := .venv/bin
CPU_BUILD := https://download.pytorch.org/whl/cpu
# The first interpreter the lab runs on; say PYTHON=... for another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
# Where torch comes from; empty is pip's default.  A CPU needs no CUDA packages, which are gigabytes.
TORCH_INDEX ?= $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo $(CPU_BUILD))

.PHONY: install quickstart test test-all test-isa lint docs results-readme bench day other_text clean

quickstart: .venv/installed
	$(BIN)/lab sweep quickstart
	@echo "What this recipe cannot stand, in about a minute: $(BIN)/lab stress"

install: .venv/installed

# Bytecode is kept whatever the environment says, or each process that a test starts would compile the lab anew.
test test-all test-isa: export PYTHONDONTWRITEBYTECODE =

test: .venv/installed-test lint
	$(BIN)/pytest -q -n 2 --dist loadgroup

# The second run composes every request anew, and tries a hundred random examples where the first tries five.
test-all: .venv/installed-extras lint
	$(BIN)/pytest -q -n 2 --dist loadgroup
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "slow or extras or hypothesis"

# The quick tests as on processors of AVX2, of AVX-512 without units for bf16, and of all that this one has: torch and
# oneDNN use no newer instructions than they are told to.  TESTS names files or options, such as TESTS="-m slow".
TESTS :=
test-isa: .venv/installed-test
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest -q -n 2 --dist loadgroup $(TESTS)
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE $(BIN)/pytest -q -n 2 --dist loadgroup $(TESTS)
	$(BIN)/pytest -q -n 2 --dist loadgroup $(TESTS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

# Verdicts, and the pages that quote them.
results-readme: .venv/installed-test
	$(BIN)/python results/write_pages.py
	$(BIN)/python results/power.py

docs: .venv/installed-docs reports
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/docs
	@cd build/reports && for part in *.html */report.html */figures */tables; do \
		mkdir -p "../docs/reports/$$(dirname $$part)" && cp -R "$$part" "../docs/reports/$$(dirname $$part)"; done
	@echo "site: build/docs/index.html"

# The report of each folder of results is drawn anew if its records, or the lab, have changed since.
CODE := $(shell find lab labwatch studies sweeps docs/reports.py -type f ! -name '*.pyc')
REPORTS := $(patsubst results/%/store.json,build/reports/%/report.html,$(wildcard results/*/store.json))
.PHONY: reports
reports: build/reports/index.html

build/reports/index.html: $(REPORTS)
	$(BIN)/python docs/reports.py

.SECONDEXPANSION:
$(REPORTS): build/reports/%/report.html: $$(wildcard results/%/*.parquet results/%/*.json results/%/*.csv results/*.csv) $(CODE) \
		| .venv/installed-docs
	@rm -rf $(@D) && mkdir -p $(@D) && cp results/$*/*.parquet results/$*/*.json $(wildcard results/$*/*.csv) $(@D) && \
		{ cp results/*.csv build/reports 2>/dev/null || true; }
	$(BIN)/python docs/reports.py $(@D)

# Which claims of Wortsman et al. 2023 hold for models that train for thousands of steps with the decay of the paper?  None
# of these seeds was used when the rules were made.  Warm-up, steps and batch size begin at learning rate 0.01, since
# below it most of the sensitivity is under-training after 4000 steps.
define DAY
logit_growth precision=bf16 seed=3,4,5
epsilon scale=day steps=8000 optimizer.lr=1e-1,3e-1,1 seed=3,4,5
stalled_block scale=day
attention_scale precision=bf16 seed=3,4,5,6,7,8
qk_norm_axis precision=bf16 seed=3,4,5,6,7,8,9,10,11,12
weight_decay scale=day steps=8000 model=d32,d64,d128 optimizer.lr=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
warm_up scale=day schedule.warmup=0.01,0.25 optimizer.lr=1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
steps scale=day optimizer.lr=1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
batch_size scale=day optimizer.lr=1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
kappa scale=day steps=8000 model=d32,d64 intervention.kappa_transplant.kappa=1,10,100,1e3,1e4 optimizer.lr=3e-3,1e-2,3e-2 seed=3,4,5
qk_layernorm scale=day steps=4000 optimizer.lr=1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1 seed=6,7,8
mup scale=day steps=4000 parametrization=standard,mup_simple,mup_full optimizer.weight_decay=2.5e-5 optimizer.lr=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
depth_width scale=day seed=3,4,5
endef

# Do the claims of figures 1, 6, 8 and 9 hold on another text?  Models of all widths
# learn this language within hundreds of steps, and best at a tenfold learning rate.  Of the board, the arms that help or
# harm are tried on fresh seeds; its window is 3e-3 to 3.
define OTHER_TEXT
qk_layernorm scale=day data=trigram steps=1000 model=d32,d64,d128 optimizer.lr=1e-2,3e-2,1e-1,3e-1,1,3 seed=3,4,5
logit_growth scale=day data=trigram steps=1000 model.width=16,32,48,64,128 optimizer.lr=1e-2,3e-2,1e-1,3e-1,1 seed=3,4,5
weight_decay scale=day data=trigram steps=1000 model=d32,d64,d128 optimizer.lr=3e-3,1e-2,3e-2,1e-1,3e-1,1,3 seed=3,4,5
mup scale=day data=trigram steps=1000 model=d32,d64,d128 parametrization=standard,mup_simple intervention=[qk_layernorm,z_loss] optimizer.weight_decay=1e-4 optimizer.lr=3e-3,1e-2,3e-2,1e-1,3e-1,1,3 seed=3,4,5
endef
export DAY OTHER_TEXT

# One sweep after another into a folder each; a sweep that fails does not stop the others, and the same command resumes.
day: .venv/installed
	@set -f; echo "$$DAY" | while read -r sweep words; do $(BIN)/lab sweep $$sweep $$words out=runs/day/$$sweep; done

other_text: .venv/installed
	@set -f; echo "$$OTHER_TEXT" | while read -r sweep words; do $(BIN)/lab sweep $$sweep $$words out=runs/other_text/$$sweep; done

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py

.venv/installed: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "instability-lab needs Python 3.11, 3.12 or 3.13; say make PYTHON=/path/to/python"; exit 2; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10)' "$$index" 2>/dev/null; \
	then echo "$$index cannot be reached; torch comes from the default index"; index=; fi; \
	echo "installing torch and the lab into .venv (once, a minute or more)"; \
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $${index:+--extra-index-url $$index} torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-test: .venv/installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

.venv/installed-extras: .venv/installed-test
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[slurm,ray,tensorboard,wandb,trackio,data,transformers,docs]'
	@touch $@

.venv/installed-docs: .venv/installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist

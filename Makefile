# Every target sets up what it needs: a fresh machine needs only Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(wildcard proto/wsc/v1/*.proto proto/vendor_wire/*.proto)

# Also where the environment forbids it: every process of the tests would compile all modules, and rewrite all asserts.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test unit lint proto docs site bench chaos simulate races fuzz opinfo vendor-test ray-test zoo-test zoo-compile venv clean

demo: venv
	$(BIN)/waferbox run --wafers 2 examples/fc_digits/train.py

# Tests wait a third of the time: three processes on two cores. What a module's tests share is made once, as far as a
# process has them all: worksteal gives each a row of tests, until one has none left.
test: venv .venv/bin/helm
	$(BIN)/pytest -n 3 --dist worksteal --durations=25

unit: venv
	$(BIN)/pytest -n 3 --dist worksteal -m "not cluster and not services and not parity"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks

# Random faults, and whether the results are those of the undisturbed run: an hour. TRIALS and SEED can be given.
chaos: venv
	$(BIN)/python tests/chaos --trials $(or $(TRIALS),200) --seed $(or $(SEED),0)

# The control plane on a virtual clock, with random faults: a minute for 2,000 seeds. SEEDS and FIRST can be given.
simulate: venv
	$(BIN)/python tests/simulation --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0)

# The tests of one process whose threads sleep at random; each failure is to be looked at: ten minutes. SEED can be given.
races: venv
	WAFERBOX_SLOW_THREADS=$(or $(SEED),0) $(BIN)/pytest -n 6 -m "not cluster and not parity"

# Malformed messages for every service and both lanes, while a job trains. MESSAGES and SEED can be given.
fuzz: venv
	$(BIN)/python tests/fuzz --messages $(or $(MESSAGES),100000) --seed $(or $(SEED),0)

# Every operator of torch's own table, into docs/operators.md: a quarter of an hour.
opinfo: venv
	$(BIN)/python tests/parity/opinfo.py --page docs/operators.md

# The vendor's own client, unmodified, on a cluster; its environment takes 6 GB. ENVIRONMENT can be given.
vendor-test: venv
	WAFERBOX_VENDOR_PYTHON=$$($(BIN)/python tests/vendor/environment.py $(or $(ENVIRONMENT),.vendor)) \
		$(BIN)/pytest -v tests/vendor

# Clusters on Ray, also over three hosts, as network namespaces: needs root, and takes a quarter of an hour.
ray-test: venv
	WAFERBOX_RAY_TEST=1 $(BIN)/pytest -v tests/ray

# The models of a checkout of the public Model Zoo, made small, three steps each, into docs/compatibility.md: ten minutes
# to half an hour. ZOO is the checkout, or several; its environment takes 3 GB, and ENVIRONMENT can be given.
zoo-test: venv
	$$($(BIN)/python tests/zoo/environment.py $(or $(ENVIRONMENT),.zoo)) tests/zoo $(ZOO); \
		status=$$?; $(BIN)/python docs/compatibility.py && exit $$status

# The configurations of a checkout at their full size, compiled only: some hours. ONLY is a part of their names.
zoo-compile: venv
	$$($(BIN)/python tests/zoo/environment.py $(or $(ENVIRONMENT),.zoo)) tests/zoo $(ZOO) \
		--full-size --only "$(ONLY)" --limit 3600

proto: venv
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--mypy_out=proto --mypy_grpc_out=proto $(PROTOS)

docs: venv
	$(BIN)/python docs/alias_modules.py
	$(BIN)/python docs/compatibility.py
	$(BIN)/python docs/folders.py
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/rights.py
	$(BIN)/python docs/roles.py
	$(BIN)/python docs/schedule_stubs.py
	$(BIN)/python docs/settings.py
	$(BIN)/python docs/vendor_calls.py
	$(BIN)/python docs/vendor_operations.py

# The pages as a site, in build/site: any warning fails, so a broken link does.
site: venv
	$(BIN)/sphinx-build --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees docs build/site

venv: .venv/.complete

# torch first, at one version: a range would let pip weigh builds with CUDA. TORCH can be given, another release of the
# range in pyproject.toml; so can TORCH_INDEX, the URL of an index of CPU wheels of torch, which spare several GB of CUDA
# libraries. pip shows the progress of these minutes. Python compiles the modules that are imported: most of twenty
# thousand never are.
.venv/.complete: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --no-compile $(TORCH_INDEX:%=--index-url %) torch==$(or $(TORCH),2.13.0)
	$(BIN)/pip install --no-compile --editable ".[dev]"
	touch $@

# Renders the chart in tests.
.venv/bin/helm: .venv/.complete tests/waferbox/helm_program.py
	$(BIN)/python tests/waferbox/helm_program.py

clean:
	rm -rf .venv build dist

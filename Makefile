# Keepstep. `make help` lists what there is.
#
# Folders and the layering are in docs/ARCHITECTURE.md. Every *.c of a folder is part of it; files named
# main.c or *_main.c have a main() of their own.

ifeq ($(origin CC),default)
CC      := gcc
endif
V       ?= 0
Q       := $(if $(filter 0,$(V)),@,)
say      = @$(if $(filter 0,$(V)),printf '  %-5s %s\n' $(1) $(2),:)
BUILD   ?= build$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(MUTANTS),-mutants)
PREFIX  ?= /usr/local
DESTDIR ?=
SEED    ?= 1
COORD   ?= local
comma   := ,

VERSION := 0.1.0
OPT     ?= -O2
WARN    := -Wall -Wextra -Werror -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wno-missing-field-initializers -Wno-unknown-warning-option -Wno-format-truncation
CFLAGS  += -std=c17 -D_GNU_SOURCE -g $(OPT) $(WARN) -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-math-errno \
           -pthread -I. -Ibase -DKEEPSTEP_VERSION='"$(VERSION)"'
LDFLAGS += -pthread
ifneq ($(SAN),)
CFLAGS  += -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif
ifneq ($(MUTANTS),)
CFLAGS  += -DKEEPSTEP_MUTANTS
endif
SYS_LIBS := -luv -llmdb -lcurl -lcjson -lcrypto -lm
PACKAGES := build-essential pkg-config libuv1-dev liblmdb-dev libcurl4-openssl-dev libcjson-dev libssl-dev python3
TEST_PACKAGES := libcmocka-dev etcd-server

FOLDERS := base wire net storage coord server worker
SRC     := $(filter-out %main.c,$(foreach d,$(FOLDERS),$(wildcard $(d)/*.c)))
OBJ     := $(SRC:%.c=$(BUILD)/%.o)
CLIENT_SRC := $(filter-out server/% storage/%,$(SRC))
SERVER_SRC := $(filter-out worker/%,$(SRC))
SIM_SRC := $(wildcard chaos/sim/*.c)
TEST_SRC := $(wildcard tests/unit/test_*.c tests/contract/test_*.c tests/scenario/test_*.c tests/integration/test_*.c chaos/live/test_*.c)
TESTS   := $(TEST_SRC:%.c=$(BUILD)/%)
BENCH   := $(patsubst %.c,$(BUILD)/%,$(wildcard bench/bench_*.c))
EXAMPLES := $(patsubst %.c,$(BUILD)/%,$(wildcard worker/examples/*.c))

.PHONY: all help deps test-deps test demo bench bench-recovery sim mutants fuzz examples install uninstall format lint clean tests
all: deps $(BUILD)/keepstep $(BUILD)/libkeepstep.so examples

help:
	@sed -n 's/^#: //p' Makefile

#: make                       build keepstep, libkeepstep.so and the examples into build/
#: make demo [COORD=etcd]     train on the digits with servers and workers that die and join
#: make test [SAN=...]        all tests (SAN=address,undefined or SAN=thread: under sanitizers)
#: make sim SEED=n            narrate one seed of the simulator
#: make mutants               remove one guard at a time; the simulator must notice each
#: make bench                 measure against raw sockets, as ratios within one run
#: make bench-recovery [TRIALS=n] [COORD=etcd]   how long training stands still when machines die, leave and join
#: make fuzz SECONDS=n        libFuzzer targets (clang), n seconds each
#: make install PREFIX=dir    program, library, headers, pkg-config file, man page (make uninstall removes them)
#: make format | lint         clang-format; layering, cores, compiler and clang-tidy checks

deps:
	@deploy/packages.sh $(PACKAGES)
test-deps: deps
	@deploy/packages.sh $(TEST_PACKAGES)

$(BUILD)/%.o: %.c | deps
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/libkeepstep_all.a: $(OBJ)
	@rm -f $@; ar rcs $@ $^
$(BUILD)/keepstep: $(BUILD)/server/main.o $(SERVER_SRC:%.c=$(BUILD)/%.o)
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(SYS_LIBS)
$(BUILD)/libkeepstep.so: $(CLIENT_SRC:%.c=$(BUILD)/%.o) worker/keepstep.map
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) -shared -Wl,-soname,libkeepstep.so.0 -Wl,--version-script=worker/keepstep.map \
	    $(filter %.o,$^) -o $@ $(SYS_LIBS)
	@ln -sf libkeepstep.so $(BUILD)/libkeepstep.so.0

examples: $(EXAMPLES)
$(BUILD)/worker/examples/%: worker/examples/%.c $(BUILD)/libkeepstep.so
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(CFLAGS) -Iworker -MMD -MP -MF $@.d $< -o $@ -L$(BUILD) -lkeepstep -Wl,-rpath,'$$ORIGIN/../..' $(LDFLAGS) -lm

$(BUILD)/sim: $(SIM_SRC:%.c=$(BUILD)/%.o) $(BUILD)/libkeepstep_all.a
	$(call say,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(SYS_LIBS)
# Scenarios drive the simulator's world.
SIM_OBJ := $(filter-out %main.o,$(SIM_SRC:%.c=$(BUILD)/%.o))
$(BUILD)/tests/scenario/%: tests/scenario/%.c $(SIM_OBJ) $(BUILD)/libkeepstep_all.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(SIM_OBJ) $(BUILD)/libkeepstep_all.a $(LDFLAGS) -lcmocka $(SYS_LIBS)
$(BUILD)/tests/%: tests/%.c $(BUILD)/libkeepstep_all.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(BUILD)/libkeepstep_all.a $(LDFLAGS) -lcmocka $(SYS_LIBS)
$(filter $(BUILD)/tests/integration/%,$(TESTS)): $(BUILD)/tests/integration/%: tests/integration/%.c $(BUILD)/tests/integration/rig.o $(BUILD)/libkeepstep_all.a $(BUILD)/keepstep
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(filter %.o %.a,$^) $(LDFLAGS) -lcmocka $(SYS_LIBS)
LIVE_OBJ := $(patsubst %.c,$(BUILD)/%.o,$(filter-out chaos/live/test_%,$(wildcard chaos/live/*.c))) $(BUILD)/tests/integration/rig.o
.SECONDARY: $(LIVE_OBJ)
$(BUILD)/chaos/live/test_%: chaos/live/test_%.c $(LIVE_OBJ) $(BUILD)/libkeepstep_all.a $(BUILD)/keepstep
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(LIVE_OBJ) $(BUILD)/libkeepstep_all.a $(LDFLAGS) -lcmocka $(SYS_LIBS)
$(BUILD)/bench/%: bench/%.c $(BUILD)/libkeepstep_all.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -MF $@.d $< -o $@ $(BUILD)/libkeepstep_all.a $(LDFLAGS) $(SYS_LIBS)

tests: test-deps $(TESTS) $(BUILD)/sim all

test: tests
	@BUILD=$(BUILD) SAN=$(SAN) tests/run

demo: all
	@BUILD=$(BUILD) COORD=$(COORD) deploy/demo.sh

sim: $(BUILD)/sim
	$(BUILD)/sim --seed $(SEED) --verbose

mutants:
	@$(MAKE) --no-print-directory MUTANTS=1 build-mutants/sim
	build-mutants/sim --mutants --seeds 2000

fuzz: deps
	@SECONDS=$(or $(SECONDS),10) tests/fuzz/run

bench: all $(BENCH)
	@BUILD=$(BUILD) bench/run
bench-recovery: all $(BUILD)/bench/bench_recovery
	@BUILD=$(BUILD) TRIALS=$(TRIALS) COORD=$(COORD) bench/recovery --phases

DEST := $(DESTDIR)$(PREFIX)
install: all
	install -d $(DEST)/bin $(DEST)/lib/pkgconfig $(DEST)/include $(DEST)/share/man/man1
	install -m 755 $(BUILD)/keepstep $(DEST)/bin/keepstep
	install -m 755 $(BUILD)/libkeepstep.so $(DEST)/lib/libkeepstep.so.$(VERSION)
	ln -sf libkeepstep.so.$(VERSION) $(DEST)/lib/libkeepstep.so.0
	ln -sf libkeepstep.so.0 $(DEST)/lib/libkeepstep.so
	install -m 644 worker/keepstep.h base/keepstep_err.h $(DEST)/include
	sed -e 's,@PREFIX@,$(PREFIX),' -e 's,@VERSION@,$(VERSION),' worker/keepstep.pc.in >$(DEST)/lib/pkgconfig/keepstep.pc
	install -m 644 docs/keepstep.1 $(DEST)/share/man/man1/keepstep.1
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || ldconfig

uninstall:
	rm -f $(DEST)/bin/keepstep $(DEST)/lib/libkeepstep.so.$(VERSION) $(DEST)/lib/libkeepstep.so.0 $(DEST)/lib/libkeepstep.so \
	    $(DEST)/include/keepstep.h $(DEST)/include/keepstep_err.h $(DEST)/lib/pkgconfig/keepstep.pc \
	    $(DEST)/share/man/man1/keepstep.1
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || ldconfig

format:
	clang-format -i $$(git ls-files '*.c' '*.h')
lint: deps
	@BUILD=$(BUILD) tests/lint.sh

clean:
	rm -rf build build-*

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

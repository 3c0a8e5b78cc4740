package keysmanager

import (
	"cmp"
	"maps"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// functions knows which parameters the node's functions use, and under which keys they are kept. It
// is a part of the store. The caller of each method holds the store's mutex.
type functions struct {
	pool        *resources.Pool
	uses        map[string]zygote.Key      // by function: the zygote of its current spec
	asks        map[string]*asking         // by function: the starts and loads that are under way
	sizes       map[zygote.Key]int64       // bytes that zygotes took, by key without generation
	generations map[zygote.Key]uint64      // how often parameters have been invalidated, by variant
	instead     map[zygote.Key]zygote.Form // of variants whose zygote, of zygote.Forks, is impossible
}

// key returns the key under which the parameters of a spec are kept now. The caller holds the
// store's mutex.
func (f *functions) key(s node.Spec, e engine, image sandbox.Image) zygote.Key {
	k := zygote.Key{
		Namespace: s.Namespace, Digest: image.Digest, Model: s.Env[wire.EnvModel], Process: s.Process, Engine: e.name, Environment: e.seen(s), Network: f.pool.NetworkOf(s.Network),
		Secrets: s.Secrets, Options: optionsOf(s).Text(),
	}
	k.Form = e.starts[formOf(s)]
	if choosesPath(s) {
		k.Form = f.instead[k]
	}
	return k
}

// newest returns a key with the current generation of its variant. The caller holds the store's
// mutex.
func (f *functions) newest(key zygote.Key) zygote.Key {
	key.Generation = f.generations[key.Variant()]
	return key
}

// renew begins a new generation of a variant's parameters and returns its number. The new
// generation may be kept in another form. The caller holds the store's mutex.
func (f *functions) renew(key zygote.Key) uint64 {
	key = key.Variant()
	delete(f.instead, key)
	f.generations[key]++
	return f.generations[key]
}

// asking is a function for which a start or a load is under way.
type asking struct {
	function  string
	count     int
	forgotten bool // Forget came after it had begun
}

// ask records that a start or load of a function begins. The caller calls asked when the start or
// load has ended. If Forget is called in between, it sets forgotten, and the start or load must not
// make the function known again. The caller holds st.mu.
func (st *store) ask(function string) *asking {
	a := st.asks[function]
	if a == nil {
		a = &asking{function: function}
		st.asks[function] = a
	}
	a.count++
	return a
}

func (st *store) asked(a *asking) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if a.count--; a.count == 0 && st.asks[a.function] == a {
		delete(st.asks, a.function)
	}
}

// unuse records that a function has no model now. The parameters of its earlier deployment are
// freed when their last replica ends.
func (st *store) unuse(a *asking) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if !a.forgotten {
		delete(st.uses, a.function)
	}
}

// fallBack makes a variant's replicas start on another path, until its parameters are invalidated.
func (st *store) fallBack(function string, key zygote.Key, why zygote.Impossible) {
	st.mu.Lock()
	defer st.mu.Unlock()
	to := engineByKey(key).next[key.Form]
	if st.instead[key.Variant()] != key.Form {
		return // another start was faster
	}
	st.instead[key.Variant()] = to
	st.cfg.Log.Warn("replicas of a function start on another path", "function", function, "path", string(to), "why", why.Why)
}

// forgetVariants forgets the data of variants that nobody uses and that are not in memory. The
// caller holds the store's mutex.
func (st *store) forgetVariants() {
	variants := map[zygote.Key]bool{}
	for _, k := range st.uses {
		variants[k.Variant()] = true
	}
	for k := range st.slots.all {
		variants[k.Variant()] = true
	}
	maps.DeleteFunc(st.sizes, func(k zygote.Key, _ int64) bool { return !variants[k.Variant()] })
	maps.DeleteFunc(st.generations, func(k zygote.Key, _ uint64) bool { return !variants[k] })
	maps.DeleteFunc(st.instead, func(k zygote.Key, _ zygote.Form) bool { return !variants[k] })
}

// nameOf returns the first function by name that uses a zygote. If no function uses the zygote, it
// returns the function that the zygote was loaded for. The caller holds the store's mutex.
func (st *store) nameOf(k zygote.Key, s *slot) string {
	first := ""
	for f, used := range st.uses {
		if used == k && (first == "" || f < first) {
			first = f
		}
	}
	if s.zygote != nil {
		return cmp.Or(first, s.zygote.Function)
	}
	return cmp.Or(first, s.function)
}

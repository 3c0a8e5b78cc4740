// Package events tells whoever listens what happens in the cluster: a [Hub] keeps the latest events and gives each to its
// listeners, over HTTP as server-sent events.
//
// Publishing never waits. A listener that reads more slowly than things happen is cut off with a last event that says how many
// it has missed, and may come back with Last-Event-ID for those that are still kept.
package events

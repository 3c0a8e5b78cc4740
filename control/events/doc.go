// Package events publishes what happens in the cluster. A [Hub] keeps the latest events and sends
// each to its listeners, over HTTP as server-sent events.
//
// Publishing never waits. A listener that reads too slowly is cut off. Its last event says how many
// events it has missed. It may reconnect with Last-Event-ID to get those that are still kept.
package events

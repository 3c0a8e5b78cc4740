// Package events publishes what happens in the cluster. A [Hub] keeps the latest events and sends
// each to its listeners, over HTTP as server-sent events.
//
// Publishing never waits. A listener that reads too slowly is cut off. The last event that it gets
// says how many events it has missed. With Last-Event-ID, a new connection gets the missed events
// that the hub still keeps.
package events

package main

import (
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
)

// openDevices watches the accelerators that the text share lists, such as "all" or "0,2" (see
// device.ParseShare). The caller ends the watch with done.
func openDevices(share string, log *slog.Logger) (devices func() []keysmanager.Device, done func(), err error) {
	s, err := device.ParseShare(share)
	if err != nil {
		return nil, nil, err
	}
	w := device.Open(device.Config{Share: s, Log: log})
	return func() []keysmanager.Device { return devicesOf(w) }, w.Close, nil
}

// devicesOf returns the devices of a watch in the KeysManager's type.
func devicesOf(w *device.Watch) (out []keysmanager.Device) {
	for _, d := range w.Devices() {
		out = append(out, keysmanager.Device{
			ID: d.UUID, Index: d.Index, Name: d.Name, Memory: d.Memory, Used: d.Used, Utilisation: d.Utilisation,
			Temperature: d.Temperature, Power: d.Power, Unhealthy: d.Fault.Text, Processes: d.Processes,
		})
	}
	return out
}

"""Training drafters for a target model: data, objective, loop, calibration."""

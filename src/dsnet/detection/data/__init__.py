"""Detection datasets: VOC annotations, images in memory, augmentation and preprocessing."""

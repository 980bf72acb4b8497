"""Images with boxes: Pascal VOC folders, augmentation, preparation."""
